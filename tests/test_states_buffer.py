"""Growth, boundaries and marks of the token buffer."""

from __future__ import annotations

import itertools

import torch

from hf_kvq.states.buffer import GRANULE, TokenBuffer, round_up


def tokens(first: int, count: int) -> dict[str, torch.Tensor]:
    numbers = torch.arange(first, first + count, dtype=torch.float32)
    return {
        "codes": numbers.view(1, 1, -1, 1).expand(2, 3, -1, 4),
        "scale": numbers.view(1, 1, -1, 1).expand(2, 1, -1, 1),
    }


def held(buffer: TokenBuffer) -> list[int]:
    view = buffer.view()
    assert torch.equal(view["codes"][0, 0, :, 0], view["scale"][1, 0, :, 0])
    return view["codes"][1, 2, :, 3].int().tolist()


def test_a_stream_is_kept_in_order():
    buffer = TokenBuffer()
    buffer.append(tokens(0, 37))
    for number in range(37, 500):
        buffer.append(tokens(number, 1))
    assert held(buffer) == list(range(500))


def test_storage_stays_put_between_growths_and_grows_seldom():
    buffer, pointers = TokenBuffer(), []
    for number in range(4096):
        buffer.append(tokens(number, 1))
        pointers.append(buffer.tensors["codes"].data_ptr())
    moves = sum(a != b for a, b in itertools.pairwise(pointers))
    assert moves <= 20
    assert buffer.capacity <= round_up(4096 + 4096 // 4)


def test_a_moving_window_is_bounded_and_moves_in_place():
    buffer, pointers = TokenBuffer(), set()
    for number in range(2000):
        buffer.append(tokens(number, 1))
        buffer.drop_before(number - 99)
        if number > 300:
            pointers.add(buffer.tensors["codes"].data_ptr())
        assert held(buffer) == list(range(max(0, number - 99), number + 1))
    assert len(pointers) == 1
    assert buffer.capacity <= round_up(101 + 101 // 4)


def test_bytes_are_those_of_the_storages_and_used_ones_of_the_tokens():
    buffer = TokenBuffer()
    buffer.append(tokens(0, 70))
    per_token = 2 * 3 * 4 * 4 + 2 * 4
    assert (
        buffer.nbytes == round_up(70) * per_token == sum(t.untyped_storage().nbytes() for t in buffer.tensors.values())
    )
    assert buffer.nbytes_used == 70 * per_token


def test_cutting_most_of_it_gives_storage_back():
    buffer = TokenBuffer()
    buffer.append(tokens(0, 1000))
    before = buffer.nbytes
    buffer.drop_from(1000 - GRANULE)
    assert buffer.nbytes == before
    buffer.drop_from(100)
    assert buffer.nbytes <= before // 4
    assert held(buffer) == list(range(100))


def test_a_mark_brings_back_dropped_and_takes_back_appended_tokens():
    buffer = TokenBuffer()
    buffer.append(tokens(0, 64))
    for number in range(64, 200):
        buffer.drop_before(number - 50)
        mark, before = buffer.mark(), held(buffer)
        buffer.append(tokens(number, 5))
        buffer.drop_before(number - 20)
        buffer.restore(mark)
        assert held(buffer) == before
        buffer.append(tokens(number, 1))


def test_a_buffer_filled_under_inference_mode_can_be_written_outside_of_it():
    buffer = TokenBuffer()
    with torch.inference_mode():
        buffer.append(tokens(0, 3))
    buffer.append(tokens(3, 3))
    assert held(buffer) == list(range(6))


def test_spare_room_can_be_a_number_of_tokens():
    buffer, moves = TokenBuffer(spare=10), 0
    for number in range(1000):
        before = buffer.tensors["codes"].data_ptr() if buffer.tensors else 0
        buffer.append(tokens(number, 1), in_place=False)
        buffer.drop_before(number - 99)
        moves += buffer.tensors["codes"].data_ptr() != before
        assert buffer.capacity <= round_up(101 + 10)
    assert held(buffer) == list(range(900, 1000))
    assert moves > 10
