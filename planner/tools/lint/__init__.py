"""Check a launch command, systemd unit, compose file or manifest."""
