"""HTTP on top of the nouns: one router per noun, no decisions and no SQL of its own."""
