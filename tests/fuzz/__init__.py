"""Parsers given input that no program would write: no input may end in another error than the ones a parser promises.

`targets.py` lists the parsers, `corpus/TARGET/` holds inputs for each: valid ones to start from, and every finding.
`test_targets.py` runs the corpus and some mutations of it with the other tests. `make fuzz` (`__main__.py`) goes on for
as long as it is told to, and writes a finding, made as small as it gets, into the corpus.
"""
