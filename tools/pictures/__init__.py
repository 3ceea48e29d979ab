"""Pictures of the documentation that code draws."""
