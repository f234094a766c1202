from cli.restart import RestartPolicy


def test_delays_double_and_the_sixth_death_in_a_minute_is_final():
    policy = RestartPolicy()
    assert [policy.next_delay(t) for t in (0, 2, 5, 10, 20, 37)] == [1, 2, 4, 8, 16, None]


def test_a_service_that_stayed_up_starts_afresh():
    policy = RestartPolicy()
    assert [policy.next_delay(t) for t in (0, 10)] == [1, 2]
    assert policy.next_delay(100) == 1


def test_old_deaths_leave_the_window_one_by_one():
    policy = RestartPolicy(first_delay_seconds=0.5, max_restarts=2, window_seconds=10)
    assert [policy.next_delay(t) for t in (0, 6, 9)] == [0.5, 1.0, None]
    assert policy.next_delay(10.5) == 1.0  # the death at 0 is forgotten, the one at 6 is not
