"""The REST service: `app` has the routes, `service` what they answer, `server` runs them alone."""
