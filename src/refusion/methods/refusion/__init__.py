"""ReFusion: slots in any order, left to right inside a slot (arXiv 2512.13586).

    corrupt.py   training rows: which slots are masked, in which order they stand, what is asked
    select.py    which slots are written next
    verify.py    which of their drafted tokens are accepted
    decode.py    the decoder: select, verify, complete, commit, until no slot is open
"""
