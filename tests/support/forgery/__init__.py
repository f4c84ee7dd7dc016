"""Forged checkpoints, from a grammar of the format: sound checksums over what cannot be.

    forgery    record | text | header | tensors | file | folder
    record     a key at any level is missing, renamed, odd, of a wrong type or an impossible value
    text       state.json that is no JSON, is deep, has a key twice, has figures without end
    header     of a tensor file: entries, dtypes, shapes, offsets, metadata, its length, its text
    tensors    others than the record names, or than the model has; counters that count nothing
    file       of another step, of another kind, a FIFO, a device, too large, empty
    folder     under another name; without its marker

Whoever forges knows the format: all checksums are made anew, also those that tie tensor files to
their record, unless they are what is forged.
"""
