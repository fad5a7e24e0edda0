"""The record as a table, as JSON, as a picture.

In: `StepRecord` and what a command measured. Out: text, dictionaries, a PNG. Keeps true: every number comes from the
record. Does not: compute policy, or print.
"""
