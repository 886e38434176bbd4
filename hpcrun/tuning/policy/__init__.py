"""Settings that measurements on a cluster support."""
