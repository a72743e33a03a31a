"""File formats that several packages read, without torch and without knowing what the contents mean."""
