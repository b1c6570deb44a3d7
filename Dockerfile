# Gecko on a CPU: docker build -t gecko . && docker run -it gecko generate books --prompt "It was "
# Keep runs and compiled kernels outside: docker run -it -v "$PWD":/work -v gecko-cache:/root/.cache gecko train tiny data.source=book.txt
FROM python:3.12-slim
RUN apt-get update && apt-get install --yes --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*
COPY pyproject.toml README.md LICENSE /gecko/
COPY src /gecko/src
RUN pip install --no-cache-dir --extra-index-url https://download.pytorch.org/whl/cpu '/gecko[all]'
WORKDIR /work
ENTRYPOINT ["gecko"]
CMD ["--help"]
