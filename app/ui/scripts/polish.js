// Names for what Gradio leaves without one: screen readers, voice control and tests go by them.
const NAMES = [
  ["#composer textarea", "Message"],
  ["#chats .toggle-button", "Chats"],
  ["#settings .toggle-button", "Settings"],
  ["#talk", "Conversation"],
  ["#chatbot .bubble-wrap", "Messages"],
  ["#growing .bubble-wrap", "Answer being written"],
  ["#batch-files button.upload-container", "Drop File Here - or - Click to Upload"],
  ["#schema .cm-content", "JSON Schema"],
  ["#schema-pydantic .cm-content", "Pydantic classes"],
];
const name = () => {
  for (const [selector, label] of NAMES)
    for (const node of document.querySelectorAll(selector)) if (node.getAttribute("aria-label") !== label) node.setAttribute("aria-label", label);
  for (const side of document.querySelectorAll(".sidebar")) {
    const button = side.querySelector(".toggle-button"), isOpen = side.classList.contains("open");
    if (button && button.getAttribute("aria-expanded") !== String(isOpen)) button.setAttribute("aria-expanded", String(isOpen));
    // What is out of sight must not be reached with the Tab key.
    const content = side.querySelector(".sidebar-content");
    if (content && content.inert === isOpen) content.inert = !isOpen;
  }
  const talk = document.querySelector("#talk");
  if (talk && !talk.dataset.pinned) { talk.dataset.pinned = "yes"; pin(talk); linkImages(talk); }
  for (const box of document.querySelectorAll(".cm-scroller, #talk")) if (box.tabIndex !== 0) box.tabIndex = 0;
};
// The conversation stays at its end while it grows, unless a person has scrolled up to read; what was just asked is
// always shown. Not by a reversed column: there every new line moves, and draws, all that stands above it.
const pin = (talk) => {
  let isPinned = true;
  const follow = () => { if (isPinned) talk.scrollTop = talk.scrollHeight; };
  talk.addEventListener("scroll", () => { isPinned = talk.scrollHeight - talk.scrollTop - talk.clientHeight < 80; }, { passive: true });
  const observer = new ResizeObserver(follow);
  for (const box of [talk, talk.firstElementChild]) if (box) observer.observe(box);
  document.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || !event.target.closest?.("#composer")) return;
    isPinned = true;
    follow();
  });
};
// Images of other hosts are not loaded (the page's policy forbids it, for it would tell them who reads what): a link
// stands for each. The image stays where it is, hidden, because Gradio removes what it has drawn node by node.
const linkImages = (talk) => {
  const images = talk.getElementsByTagName("img"), links = talk.getElementsByClassName("remote-image");
  const update = () => {
    for (const link of [...links]) if (!link.image?.isConnected) link.remove();
    for (const image of images) {
      if (image.dataset.remote || !/^https?:/.test(image.src) || new URL(image.src).origin === location.origin) continue;
      image.dataset.remote = "yes";
      image.style.display = "none";
      const link = document.createElement("a");
      Object.assign(link, { className: "remote-image", href: image.src, title: image.src, target: "_blank", rel: "noopener noreferrer", image });
      link.textContent = `Image: ${image.alt || image.src}`;
      image.after(link);
    }
  };
  new MutationObserver(update).observe(talk, { childList: true, subtree: true });
  update();
};
let isDue = false;
new MutationObserver(() => {
  if (isDue) return;
  isDue = true;
  setTimeout(() => { isDue = false; name(); }, 200);
}).observe(document.body, { childList: true, subtree: true, attributes: true, attributeFilter: ["class"] });
name();
document.documentElement.lang ||= "en";
