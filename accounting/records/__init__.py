"""What is stored: files, norm shards, traces and epsilons, and the names of a trial's files."""
