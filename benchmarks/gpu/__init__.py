"""All that is measured on a machine with a GPU, in one command of eight minutes: see `benchmarks/on_gpu.sh --help`."""
