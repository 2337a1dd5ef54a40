"""The values of a plan: configurations, their cost, their placement, and the search space.

Read `configuration` and `cost` first. `topology`, `kinds` and `placement` describe the devices;
`split` splits the batch; `collectives` predicts the time of sums; `search_request` and
`search_space` define a search.
"""
