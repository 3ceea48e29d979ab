"""One module per format: bytes -> the texts in them. `formats` lists which reader reads which file."""
