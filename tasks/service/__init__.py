"""The REST service: `app` has the routes, `service` the answers, `server` runs it standalone."""
