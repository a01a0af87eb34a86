"""Products in 8 bits and the way from S to P, on the emulator: numbers of e4m3 and their rounding, both kinds of sums, the order of V's keys."""

import numpy as np
import pytest
import torch
from device_functions import Products
from emulator import arithmetic
from emulator.backend import NEEDED, Emulated

from tilewise.sm90 import jit, key_order

pytestmark = NEEDED


def arguments(config):
    from tilewise.sm90.dsl import Float8E4M3FN, Float32, Int8, Int32

    given, found = (Int8, Int32) if config.integers else (Float8E4M3FN, Float32)
    sizes = (64, config.head_dim), (config.tile_n, config.head_dim), (config.head_dim, config.tile_n)
    return [*(jit.tensor(given, 1, *size) for size in sizes), jit.tensor(found, 64, config.tile_n), jit.tensor(found, 64, config.head_dim)]


def run(config, q, k, v, **options):
    """S and O."""
    dtype = torch.int32 if config.integers else torch.float32
    found = [torch.full((64, n), -7, dtype=dtype) for n in (config.tile_n, config.head_dim)]
    Emulated(**options).compiled("device_functions:launch_products", arguments, config)(
        q[None], k[None], key_order.transposed(v)[None], *found
    )
    return found


def draw(*sizes, spread=1.0, seed=0):
    return (torch.randn(*sizes, generator=torch.Generator().manual_seed(seed), dtype=torch.float32) * spread).to(torch.float8_e4m3fn)


@pytest.mark.parametrize("head_dim, tile_n", [(64, 96), (128, 128)])
def test_P_goes_from_one_product_to_the_next(head_dim, tile_n):
    q, k, v = draw(64, head_dim, spread=5), draw(tile_n, head_dim, spread=5, seed=1), draw(tile_n, head_dim, seed=2)
    s, o = run(Products(head_dim, tile_n, False), q, k, v)
    want = q.double() @ k.double().T
    torch.testing.assert_close(s.double(), want, rtol=1e-6, atol=1e-6)
    assert (want.abs() > 448).any()  # saturates
    p = s.clamp(-448, 448).to(torch.float8_e4m3fn).double()
    torch.testing.assert_close(o.double(), p @ v.double(), rtol=1e-6, atol=1e-4)


def test_integers():
    """Of the largest size, too; P is the registers' bits, so that each is where the instruction reads it."""
    q, k, v = (torch.randint(-128, 128, (n, 64), generator=torch.Generator().manual_seed(n), dtype=torch.int8) for n in (64, 97, 96))
    k = k[:96]
    q[0], k[0] = 127, -128
    s, o = run(Products(64, 96, True), q, k, v)
    assert torch.equal(s, q.int() @ k.int().T) and s[0, 0] == -127 * 128 * 64
    thread, word = np.arange(128)[:, None], np.arange(12)[None, :]
    p = np.zeros((64, 96), np.int8)
    row = thread // 32 * 16 + thread % 32 // 4 + 8 * (word % 2)
    for byte in range(4):  # of a word: places 4 q + byte of a group of 16, which the permutation of V sends to keys
        p[row, word // 2 * 16 + np.array(key_order.ORDER)[4 * (thread % 4) + byte]] = (
            (thread * 7919 + word * 104729).astype(np.int32) >> 8 * byte
        ).astype(np.int8)
    assert torch.equal(o, torch.from_numpy(p).int() @ v.int())


def test_sums_of_thirteen_bits():
    """1 + 31 x 2^-13 is more than 1, but 2^-14 is lost beside 1; as is its negative: numbers are cut off towards zero."""
    q = torch.zeros(64, 64)
    q[:, 0] = 1
    q[0, 1:32], q[1, 1:32], q[2, 1:32] = 2.0**-6, 2.0**-7, -(2.0**-7)
    k = torch.full((16, 64), 2.0**-7)
    k[:, 0] = 1
    q, k = q.to(torch.float8_e4m3fn), k.to(torch.float8_e4m3fn)
    config = Products(64, 16, False)
    exact, cut = run(config, q, k, k)[0], run(config, q, k, k, fraction=13)[0]
    assert exact[:3, 0].tolist() == [1 + 31 * 2.0**-13, 1 + 31 * 2.0**-14, 1 - 31 * 2.0**-14]
    assert cut[:3, 0].tolist() == [1 + 31 * 2.0**-13, 1.0, 1.0]


def test_numbers_are_rounded_as_torch_rounds_them():
    bits = np.random.default_rng(0).integers(0, 1 << 32, 1 << 16, dtype=np.uint32)
    near = np.float32(np.random.default_rng(1).normal(size=1 << 16) * 2.0 ** np.random.default_rng(2).integers(-12, 10, 1 << 16))
    halves = (arithmetic.E4M3[:0x7E] + arithmetic.E4M3[1:0x7F]) / 2
    x = np.concatenate([bits.view(np.float32), near, halves, -halves, np.float32([0.0, -0.0, np.inf, -np.inf, 448, 464, 465])])
    with np.errstate(invalid="ignore"):
        found = arithmetic.e4m3(x)
    mine, theirs = torch.from_numpy(found), torch.from_numpy(x).clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
    assert torch.equal(mine & 0x7F, theirs & 0x7F) and torch.equal(mine[~np.isnan(x)], theirs[~np.isnan(x)])
    every = torch.arange(256, dtype=torch.uint8)
    assert np.array_equal(arithmetic.E4M3, every.view(torch.float8_e4m3fn).float().numpy(), equal_nan=True)
