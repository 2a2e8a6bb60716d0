"""What is asked: the sweep file, its grid of trials, and the plan of each."""
