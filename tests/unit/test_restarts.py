from tools.restarts import CONFIGURATION_ERROR, TRIES_BEFORE_READY, Restarts


def test_delays_double_up_to_the_longest_and_start_over_after_a_steady_life() -> None:
    restarts = Restarts()
    delays = [restarts.delay_after(1, lived_s=0.5, was_ready=True) for _ in range(8)]
    assert delays == [0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0]
    assert restarts.delay_after(1, lived_s=30.0, was_ready=True) == 0.1


def test_a_child_that_dies_again_and_again_before_the_system_is_ready_cannot_start() -> None:
    restarts = Restarts()
    for _ in range(TRIES_BEFORE_READY - 1):
        assert restarts.delay_after(-9, lived_s=0.1, was_ready=False) is not None
    assert restarts.delay_after(-9, lived_s=0.1, was_ready=False) is None


def test_a_configuration_error_is_never_tried_again() -> None:
    assert Restarts().delay_after(CONFIGURATION_ERROR, lived_s=100, was_ready=True) is None
