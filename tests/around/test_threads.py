"""Several Python threads that call at once, each its own function or all the same one, get what one alone gets."""

import threading
from functools import partial

import torch
from surroundings import FUNCTIONS, check_cells, check_equal, of, plain

from tilewise.runtime import call_cache

THREADS, ROUNDS = 6, 20
STEADY = [name for name in FUNCTIONS if name != "attention, seed drawn"]  # torch's generator is one for all threads


def together(*names: str, forgetful: bool = False) -> None:
    wants = {name: plain(name) for name in names}
    call_cache.forget()
    start, wrong = threading.Barrier(THREADS), []

    def work(first: int) -> None:
        try:
            torch.set_num_threads(1 + first % 2)
            start.wait()
            for n in range(ROUNDS):
                name = names[(first + n) % len(names)]
                check_equal(of(FUNCTIONS[name], FUNCTIONS[name].make()), wants[name])
                if forgetful and n % 5 == first % 5:
                    call_cache.forget()
        except Exception as error:
            wrong.append(error)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(THREADS)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    if wrong:
        raise wrong[0]


CELLS = {name: partial(together, name) for name in STEADY} | {
    "all": partial(together, *STEADY),
    "all, forgotten meanwhile": partial(together, *STEADY, forgetful=True),
}


def test_cells():
    check_cells(__file__)
