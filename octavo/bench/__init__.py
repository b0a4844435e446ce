"""What the `octavo bench` commands measure: plain rows of numbers. Lies below cli/ and above engine/."""
