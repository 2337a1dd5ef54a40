"""Step `allocate`: chooses devices and leases them."""
