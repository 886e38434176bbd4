"""Messages between processes: lines and frames of JSON over pipes and sockets, handshakes, listeners."""
