"""What results mean: metrics, settings averaged over seeds, and the joined record of a sweep. Pure."""
