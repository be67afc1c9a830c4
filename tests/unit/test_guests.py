"""A thread that wants the engine's lock once gets it between two steps of another."""

import threading
import time

from pyllm.guests import Guests

STEP = 0.002  # seconds
TURNS = 20


def steps_while_waiting(gives_way: bool) -> int:
    """The most steps that go by while another thread waits for the lock."""
    lock, guests, stop = threading.RLock(), Guests(), threading.Event()
    done = 0

    def run() -> None:
        nonlocal done
        while not stop.is_set() and done < 500:
            with lock:
                time.sleep(STEP)
                done += 1
            if gives_way:
                guests.give_way()

    thread = threading.Thread(target=run)
    thread.start()
    waited = []
    try:
        for _ in range(TURNS):
            before = done
            with guests, lock:
                waited.append(done - before)
    finally:
        stop.set()
        thread.join()
    return max(waited)


def test_a_guest_waits_for_few_steps() -> None:
    assert steps_while_waiting(gives_way=True) <= 5  # one; more on a machine that is busy with other things


def test_nobody_waits_without_guests() -> None:
    guests, started = Guests(), time.perf_counter()
    with guests:
        pass
    for _ in range(1000):
        guests.give_way()
    assert time.perf_counter() - started < 0.05 and not guests._threads
