"""What self-contained HTML pages of the package share: their look, and pictures as inline SVG."""
