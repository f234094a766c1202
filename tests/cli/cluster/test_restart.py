from cli.cluster.supervisor import RestartPolicy


def test_the_first_restart_is_immediate_and_later_ones_wait_longer_up_to_a_limit():
    policy = RestartPolicy()
    assert [policy.next_delay(3.0) for _ in range(8)] == [0, 0.5, 1, 2, 4, 8, 10, 10]


def test_a_service_that_was_ready_for_longer_than_the_longest_delay_starts_afresh():
    policy = RestartPolicy(first_delay_seconds=1, max_delay_seconds=4)
    ready = (0, 0, 0, 0, 4, 4.1, 0)
    assert [policy.next_delay(seconds) for seconds in ready] == [0, 1, 2, 4, 4, 0, 1]
