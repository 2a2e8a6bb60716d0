"""Privacy accounting for DP-SGD runs: whole data set, groups and individuals. Loads neither torch, ray nor mlflow."""
