"""What the package ships for people to copy and edit: example jobs."""
