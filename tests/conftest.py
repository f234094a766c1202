"""Settings of Hypothesis for all tests."""

try:
    from hypothesis import settings
except ImportError:  # a GPU machine has what tests/gpu and tests/kernels need
    pass
else:
    # No deadline: a busy machine is slow. The same examples in each run: what fails here fails everywhere.
    settings.register_profile("repeatable", deadline=None, derandomize=True)
    # For looking for new failures: pytest --hypothesis-profile=explore
    settings.register_profile("explore", deadline=None, max_examples=1000)
    settings.load_profile("repeatable")
