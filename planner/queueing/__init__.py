"""The closed form of what the simulator replays: for ranking, sweeps and sliders."""
