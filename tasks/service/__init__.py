"""The REST service: `app` (routes), `auth`, `limits`, `work` (bounded, cancelled, cached), `fork_client` (what answers)."""
