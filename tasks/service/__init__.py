"""The REST service: `app` (routes), `auth`, `limits`, `work` (bounded, cancelled, cached), `warm` (processes that answer)."""
