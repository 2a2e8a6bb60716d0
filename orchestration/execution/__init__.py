"""What runs: Ray, the trials under Tune, the coordinator that follows them, and accounting as each one ends."""
