"""Token files and corpora: made from text, and inspected without loading them."""
