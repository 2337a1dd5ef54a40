"""Inputs that are not columns of numbers and categories: texts, images, time series.

`text_column` and `tokens` make numbers of texts, `images` pixels of image files, `forecast_table`
and `series` windows of a table with time stamps. `augmentation` changes training images at random.
"""
