"""`headroom rehearse`: play the server of a plan before anything is rented."""
