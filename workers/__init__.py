"""DP-SGD training of one trial: data, models, clipping, noise and per-example gradient norms. Imports neither Ray nor
MLflow."""
