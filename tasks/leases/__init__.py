"""Who holds which device and run: the ledger of leases, and the queue for devices."""
