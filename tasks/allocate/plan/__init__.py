"""Values a plan is made of: configurations, their cost, their placement, and what is searched.

`configuration` and `cost` first. `topology`, `kinds` and `placement` are the devices; `split`
shares the batch; `collectives` times the sums; `search_request` and `search_space` are what is
searched.
"""
