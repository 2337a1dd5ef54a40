"""From data to a model: source code made for a data set.

Read `templates/` first: each module there is one family of models. `source_code` writes what all
generated files have in common.
"""
