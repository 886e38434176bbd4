"""Communication settings: what each variable means, what is wrong in an environment, what to set, and why."""
