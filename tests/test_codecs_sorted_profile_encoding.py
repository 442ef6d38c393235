"""Bytes of sorted profiles: what is counted, what comes back, and what is refused."""

from __future__ import annotations

import dataclasses
import struct
import zlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles_sorted_profile import packed

from hf_kvq.codecs.sorted_profile import fit_sorted_profile, reconstruct
from hf_kvq.codecs.sorted_profile_encoding import SortedProfileEncoding, pack_codes, unpack_codes
from hf_kvq.codecs.sorted_profile_families import Profile

SHAPE = (7, 5)
HEADER = 5
"""Offset of the header: dense, family, requested, rank_bits, axes, top_k (4 bytes), two float64."""
DIMENSIONS = HEADER + 9 + 16
PARAMETERS = DIMENSIONS + 4 * len(SHAPE)
HEAD = PARAMETERS + 16


def encoding(kind="ranks"):
    x = np.random.default_rng(0).standard_normal(SHAPE).astype(np.float32)
    threshold = 0.0 if kind == "dense" else 1.0
    return fit_sorted_profile(x, 2, gof_threshold=threshold, rank_bits=3 if kind == "codes" else None)


KINDS = ["ranks", "codes", "dense"]


def with_checksum(body):
    return body + struct.pack("<I", zlib.crc32(body))


def changed(data, offset, replacement):
    """`data` with bytes replaced and a checksum that agrees: what a liar would send."""
    body = data[:-4]
    return with_checksum(body[:offset] + replacement + body[offset + len(replacement) :])


@pytest.mark.parametrize("kind", KINDS)
def test_bytes_hold_all_of_an_encoding(kind):
    first = encoding(kind)
    again = SortedProfileEncoding.from_bytes(first.to_bytes())
    for field in dataclasses.fields(SortedProfileEncoding):
        one, other = getattr(first, field.name), getattr(again, field.name)
        if isinstance(one, np.ndarray):
            assert (one.dtype, one.tolist()) == (other.dtype, other.tolist())
        else:
            assert one == other
    assert np.array_equal(reconstruct(again), reconstruct(first))


@pytest.mark.parametrize(
    ("kind", "payload"), [("ranks", 2 * (1 + 4) + 33), ("codes", 2 * (1 + 4) + 13), ("dense", 4 * 35)]
)
def test_every_byte_is_counted(kind, payload):
    # Magic, version, header, two sizes, two parameters, checksum: 58 bytes.
    assert encoding(kind).nbytes == len(encoding(kind).to_bytes()) == 58 + payload
    assert encoding(kind).bits_per_element == (58 + payload) * 8 / 35


def test_bits_per_element_of_nothing_are_nothing():
    assert fit_sorted_profile(np.empty((0, 3), np.float32)).bits_per_element == 0


def test_the_format_of_version_1_does_not_change():
    x = np.array([[0.5, -1.0], [8.0, 2.0]], np.float32)
    first = fit_sorted_profile(x, 1, gof_threshold=1.0)
    body = b"HKSP\x01" + bytes([0, 0, 0, 0, 2]) + struct.pack("<Idd", 1, first.ks_statistic, 1.0)
    body += struct.pack("<IIdd", 2, 2, *first.profile.parameters) + b"\x02" + struct.pack("<f", 8.0) + b"\x01\x00\x02"
    assert first.to_bytes() == with_checksum(body)


@pytest.mark.parametrize("kind", KINDS)
def test_bytes_cut_anywhere_are_refused(kind):
    data = encoding(kind).to_bytes()
    for length in range(len(data)):
        with pytest.raises(ValueError, match="sorted profile"):
            SortedProfileEncoding.from_bytes(data[:length])


@pytest.mark.parametrize("kind", KINDS)
def test_cut_bytes_are_refused_even_with_a_checksum_that_agrees(kind):
    body = encoding(kind).to_bytes()[:-4]
    for length in range(len(body)):
        with pytest.raises(ValueError, match="sorted profile"):
            SortedProfileEncoding.from_bytes(with_checksum(body[:length]))


@pytest.mark.parametrize("kind", KINDS)
def test_any_flipped_bit_is_found(kind):
    data = encoding(kind).to_bytes()
    for place in range(len(data) * 8):
        flipped = bytearray(data)
        flipped[place // 8] ^= 1 << place % 8
        with pytest.raises(ValueError, match="sorted profile"):
            SortedProfileEncoding.from_bytes(bytes(flipped))


@pytest.mark.parametrize("kind", KINDS)
def test_bytes_after_the_end_are_refused(kind):
    data = encoding(kind).to_bytes()
    with pytest.raises(ValueError, match="checksum"):
        SortedProfileEncoding.from_bytes(data + b"\0")
    with pytest.raises(ValueError, match="1 bytes too many"):
        SortedProfileEncoding.from_bytes(with_checksum(data[:-4] + b"\0"))


@pytest.mark.parametrize("version", [0, 2, 255])
def test_other_versions_are_named(version):
    with pytest.raises(ValueError, match=f"version {version}; this package reads version 1"):
        SortedProfileEncoding.from_bytes(changed(encoding().to_bytes(), 4, bytes([version])))


def test_foreign_bytes_are_refused():
    with pytest.raises(ValueError, match="no sorted profile"):
        SortedProfileEncoding.from_bytes(b"\x80\x04\x95" + bytes(100))


@pytest.mark.parametrize(
    ("offset", "replacement", "message"),
    [
        (HEADER, b"\x02", "no flag 2"),
        (HEADER + 1, b"\x05", "no family 5"),
        (HEADER + 2, b"\xff", "or 255"),
        (HEADER + 3, b"\x11", "bytes are needed|bytes too many"),
        (HEADER + 4, b"\x00", "head of 2 elements in a tensor of shape \\(\\)"),
        (HEADER + 4, b"\xff", "bytes are needed"),
        (HEADER + 5, b"\xff\xff\xff\xff", "head of 4294967295"),
        (HEADER + 9, struct.pack("<d", float("nan")), "KS statistic"),
        (HEADER + 17, struct.pack("<d", 2.0), "KS statistic"),
        (DIMENSIONS, b"\xff" * 8, "head of 2 elements in a tensor of shape \\(4294967295, 4294967295\\)"),
        (DIMENSIONS, b"\xff\xff\xff\x0f", "bytes are needed"),
        (DIMENSIONS, b"\x08", "bytes are needed"),
        (DIMENSIONS, b"\x06", "bytes too many"),
        (PARAMETERS, struct.pack("<d", float("inf")), "finite parameters"),
        (PARAMETERS + 8, struct.pack("<d", -1.0), "scale at least 0"),
        (HEAD, b"\x22\x01", "must ascend"),
        (HEAD, b"\x01\x01", "must ascend"),
        (HEAD, b"\x01\x23", "stay below 35"),
        (HEAD + 2, struct.pack("<f", float("nan")), "must be finite"),
        (HEAD + 10, b"\x21", "must be a permutation"),
        (HEAD + 10, b"\xff", "must be a permutation"),
        (HEAD + 10, b"\x00\x00", "must be a permutation"),
    ],
)
def test_lies_with_a_checksum_that_agrees_are_refused(offset, replacement, message):
    with pytest.raises(ValueError, match=message):
        SortedProfileEncoding.from_bytes(changed(encoding().to_bytes(), offset, replacement))


def test_bits_after_the_last_code_must_be_zero():
    data = encoding("codes").to_bytes()
    with pytest.raises(ValueError, match="after the last code"):
        SortedProfileEncoding.from_bytes(changed(data, len(data) - 5, b"\xff"))


def test_dense_elements_must_be_finite():
    data = encoding("dense").to_bytes()
    with pytest.raises(ValueError, match="must be finite"):
        SortedProfileEncoding.from_bytes(changed(data, len(data) - 8, struct.pack("<f", float("inf"))))


@pytest.mark.parametrize("shape", [(1,) * 33, (0, 2**31, 2**31)])
def test_shapes_that_not_every_numpy_can_hold_are_refused(shape):
    elements = int(np.prod(shape))
    with pytest.raises(ValueError, match="on 32 axes"):
        dataclasses.replace(encoding("dense"), shape=shape, top_k=0, dense_values=np.zeros(elements, np.float32))


@settings(deadline=None)
@given(st.sampled_from(KINDS), st.data())
def test_whatever_the_bytes_they_are_read_or_refused(kind, data):
    body = bytearray(encoding(kind).to_bytes()[:-4])
    for _ in range(data.draw(st.integers(1, 4))):
        body[data.draw(st.integers(5, len(body) - 1))] = data.draw(st.integers(0, 255))
    try:
        read = SortedProfileEncoding.from_bytes(with_checksum(bytes(body)))
        decoded = reconstruct(read)
    except ValueError:
        return
    assert decoded.shape == read.shape
    assert read.to_bytes() == with_checksum(bytes(body))


@settings(deadline=None)
@given(st.binary(max_size=200), st.booleans())
def test_random_bytes_are_refused(tail, agrees):
    body = b"HKSP\x01" + tail
    with pytest.raises(ValueError, match=r"sorted profile|must|parameters|shapes|take|head"):
        SortedProfileEncoding.from_bytes(with_checksum(body) if agrees else body)


@pytest.mark.usefixtures("as_users_run_it")
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rank_bits": 17}, "rank_bits must be 1 to 16"),
        ({"rank_bits": 4}, "33 codes of 4 bits take 17 bytes, got 33"),
        ({"codes": np.arange(33, dtype=np.uint16)}, "33 ranks are uint8, got 33 of uint16"),
        ({"codes": np.arange(32, dtype=np.uint8)}, "33 ranks are uint8, got 32"),
        ({"top_k": 36}, "head of 36 in 35 elements"),
        ({"head_values": np.zeros(3, np.float32)}, "got 2 and 3"),
        ({"dense_values": np.zeros(35, np.float32)}, "needs 0 indices"),
        ({"profile": Profile("norm", (0.0, 1.0)), "ks_threshold": -0.5}, "KS statistic and threshold"),
    ],
)
def test_an_encoding_that_cannot_be_read_is_not_made(change, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(encoding(), **change)


@pytest.mark.parametrize("bits", [1, 2, 3, 5, 8, 11, 16])
@pytest.mark.parametrize("count", [0, 1, 37, 128, 129])
def test_packed_codes_are_one_long_number(count, bits):
    codes = np.random.default_rng(bits).integers(0, 2**bits, count).astype(np.uint16)
    bytes_ = pack_codes(codes, bits)
    assert bytes_.tobytes() == packed(codes.tolist(), bits)
    assert unpack_codes(bytes_, bits, count).tolist() == codes.tolist()
