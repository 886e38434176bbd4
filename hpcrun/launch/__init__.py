"""Launch: from a job file to a run that goes on; `agents`, `watch`, `health`, … are rooms of their own in it."""
