"""What a node says of its network, what is wrong there, and which of several stands out."""
