"""Headers of tensor files that do not fit their data, or are none."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable

from support.forgery.forged import ODD, TENSORS, Forged, Json

from quorate.services.checkpoints.files import RECORD_SHA256
from quorate.services.checkpoints.tensor_file import MOST_HEADER_BYTES


def forged_header(forged: Forged) -> str:
    chance = forged.chance
    file = chance.choice(TENSORS)
    header, data = forged.headers[file], forged.data[file]
    name = forged.tensor(file)
    entry = header[name]
    text = json.dumps(header).encode()

    def offsets(change: Callable[[int, int], list[Json]]) -> Callable[[], None]:
        def apply() -> None:
            entry["data_offsets"] = change(*entry["data_offsets"])

        return apply

    def odd_entry() -> None:
        key = chance.choice(["dtype", "shape", "data_offsets"])
        wrong = [v for v in ODD if v != entry[key] and not (key == "shape" and v == [])]
        entry[key] = copy.deepcopy(chance.choice(wrong))

    def set_text(value: bytes) -> Callable[[], None]:
        return lambda: forged.texts.update({file: value})

    def set_length(change: Callable[[int], int]) -> Callable[[], None]:
        def apply() -> None:
            forged.raw[file] = change(len(text)).to_bytes(8, "little") + text + data

        return apply

    ways: dict[str, Callable[[], None]] = {
        "an odd entry": odd_entry,
        "offsets that overlap": offsets(
            lambda a, b: [max(0, a - 4), b - 4] if a else [a + 4, b + 4]
        ),
        "offsets behind the end": offsets(lambda a, b: [a + (1 << 40), b + (1 << 40)]),
        "offsets in reverse": offsets(lambda a, b: [b + 1, a]),
        "offsets below zero": offsets(lambda a, b: [a - (1 << 20), b - (1 << 20)]),
        "one offset": offsets(lambda a, b: [a]),
        "huge offsets": offsets(lambda a, b: [a, 10**30]),
        "true for 1": lambda: entry.update(shape=[True, *entry["shape"]]),
        "a shape of other size": lambda: entry.update(shape=[*entry["shape"], 3]),
        "a shape without end": lambda: entry.update(shape=[1] * 100_000),
        "an overflowing shape": lambda: entry.update(shape=[0, 1 << 62, 1 << 62]),
        "an unknown dtype": lambda: entry.update(dtype="F31"),
        "a dtype of other size": lambda: entry.update(dtype="F16"),
        "an entry too many": lambda: entry.update(more=1),
        "a tensor that is no entry": lambda: header.update({name: 7}),
        "metadata of a wrong type": lambda: header.update(__metadata__=chance.choice([[], 7, "a"])),
        "metadata that are no strings": lambda: header["__metadata__"].update(a=1),
        "the tie of another record": lambda: (
            forged.keeps_link.add(file) or header["__metadata__"].update({RECORD_SHA256: "0" * 64})
        ),
        "no JSON": set_text(text[:-2] + b"  "),
        "no UTF-8": set_text(text.replace(name[:1].encode(), b"\xff", 1)),
        "a deep header": set_text(b'{"a":' * 50_000 + b"1" + b"}" * 50_000),
        "a name twice": set_text(
            b"{" + json.dumps(name).encode() + b": " + json.dumps(entry).encode() + b"," + text[1:]
        ),
        "a list": set_text(b"[" + text + b"]"),
        "a length of 0": set_length(lambda n: 0),
        "a length too small": set_length(lambda n: n - 1),
        "a length too large": set_length(lambda n: n + 8),
        "a length of 2**63": set_length(lambda n: (1 << 63) + n),
        "a header of 100 MB": set_length(lambda n: 100_000_000),
        "bytes behind the end": lambda: forged.data.update({file: data + b"\0" * 8}),
        "bytes missing": lambda: forged.data.update({file: data[:-1]}),
        "an empty file": lambda: forged.raw.update({file: b""}),
        "seven bytes": lambda: forged.raw.update({file: b"\2\0\0\0\0\0\0"}),
    }
    if chance.random() < 0.01:
        # It is there as a whole, as the format wants it: spaces behind the JSON.
        padded = text + b" " * (MOST_HEADER_BYTES + 8 - len(text))
        ways = {"a header that is larger than allowed": set_text(padded)}
    way = chance.choice([*ways])
    ways[way]()
    return f"{file}: {way}: {name}"
