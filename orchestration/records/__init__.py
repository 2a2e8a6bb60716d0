"""What is kept: the files of a sweep, the states and results of its trials, and who may write them."""
