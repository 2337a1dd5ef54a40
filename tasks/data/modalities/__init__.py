"""Inputs that are not columns of numbers and categories: texts, images, time series.

`tokens` makes numbers of texts, `images` pixels of image files, `series` windows of tables with
time stamps. `augmentation` changes training images at random.
"""
