"""What each communication variable means, and which values it takes."""
