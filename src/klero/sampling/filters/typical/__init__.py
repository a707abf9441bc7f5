"""typical-p as an op: list the tokens whose surprise is nearest to the expected one (docs/draw.md, 3).

Contract: filters/__init__.py; definition: `typical_p` in filters/reference.py. What it leaves is no prefix of the total
order, so the kernel lists it and the other filters go on with the list as their row. Agreement: *set*.
"""
