"""events.jsonl and chaos.jsonl: each kind of event is a class with its fields and its text."""
