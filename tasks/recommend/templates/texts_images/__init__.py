"""Families of models that classify texts or images.

`class_parts` has what all of them share, `text_parts` and `image_parts` what those of one kind do;
every other module is one family.
"""
