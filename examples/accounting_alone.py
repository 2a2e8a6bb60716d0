"""Account for training that another library runs; needs neither torch nor Ray."""

from dpsweep.accounting import PoissonSampling, Segment, Trace, account, calibrate_noise_multiplier

EXAMPLES, BATCH, EPOCHS, DELTA = 60_000, 600, 10, 1e-5


def trace(noise_multiplier: float) -> Trace:
    """Ten epochs of DP-SGD with Poisson batches; the noise multiplier is 10 % lower in the second half."""
    sampling, half = PoissonSampling(BATCH / EXAMPLES), EPOCHS * EXAMPLES // BATCH // 2
    return Trace(
        dataset_size=EXAMPLES,
        segments=(
            Segment(0, half, sampling, noise_multiplier),
            Segment(half, half, sampling, 0.9 * noise_multiplier),
        ),
    )


def main() -> None:
    spent = account(trace(1.0), DELTA)
    print(f"noise 1.0: epsilon {spent.epsilon:.3f} at delta {DELTA:g}, a {spent.kind} by {spent.accountant}")
    four = account(trace(1.0), DELTA, "pld", group_size=4)
    print(f"four records together: epsilon {four.epsilon:.3f}, at least {four.lower_epsilon:.3f}")
    noise = calibrate_noise_multiplier(trace, 2.0, DELTA)
    print(f"epsilon 2 needs noise {noise:.3f}")


if __name__ == "__main__":
    main()
